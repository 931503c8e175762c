"""The config section `backend.ipu`: all settings of a run on Graphcore IPUs. This file imports
neither torch nor PopTorch.

Options of PopTorch and PopART have their own names, which `options.yaml` lists with their types:

    options: {TensorLocations: {setOptimizerLocation: {useOnChipStorage: false}}}
    options: {TensorLocations.setOptimizerLocation.useOnChipStorage: false}          the same

Source: PopTorch, branch sdk-release-3.4 (poptorch/python/options.py).
"""

from __future__ import annotations

from pathlib import Path

# pydantic evaluates annotations, and Python 3.8 knows neither dict[str, Any] nor X | None
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional, Tuple, Union

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictStr,
    create_model,
    model_serializer,
    model_validator,
)
from typing_extensions import Annotated, Literal

from ipu_pipe.config.compare import flatten
from ipu_pipe.config.load import merge_keys, read_yaml
from ipu_pipe.config.values import (
    NUMBER,
    Case,
    Count,
    NonEmpty,
    NotNegative,
    Positive,
    Section,
    Whole,
    key_fault,
    say_allowed,
)
from ipu_pipe.refusals import NONE, name_key, show_in_config

# a share of an IPU's memory
Proportion = Annotated[float, Field(ge=0, le=1), NUMBER]


TABLE = read_yaml(Path(__file__).with_name("options.yaml"))
# strict types, because pydantic would take 1 or "yes" for a bool
TYPES: Dict[str, Any] = {
    "bool": StrictBool,
    "uint64": Whole,
    "floating point": StrictFloat,
    "string": StrictStr,
    # PopTorch takes nothing but text in them
    "list": List[StrictStr],
    "mapping": Dict[str, StrictStr],
}
# key of backend.ipu -> why it is refused; VALUE is the value that it has
REFUSED = {
    **{key: f"was replaced: use {name_key(new)}" for key, new in TABLE["former"].items()},
    **{
        f"popart_options.{name}": f"the library sets it: {f'use {name_key(key)}' if key else 'leave it out'}"
        for name, key in TABLE["set_by"].items()
    },
}


class NamedOptions(Section):
    """Options by their own names. Those that are not set are left to PopTorch."""

    # PopART has a model_name
    model_config = ConfigDict(protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        """Turn a name with dots into the section and the name in it."""
        nested: Dict[str, Any] = {}
        for name, item in cls._join_names(value) if isinstance(value, dict) else ():
            section, _, rest = str(name).partition(".")
            is_divided = rest and section in cls.model_fields
            # merged, because a section may be named both ways in one config
            nested = merge_keys(nested, {section: {rest: item}} if is_divided else {name: item})
        return nested if isinstance(value, dict) else value

    @classmethod
    def _join_names(cls, value: Any, prefix: str = "") -> Iterator[Any]:
        """Yield the items of a mapping. Names of PopART have dots of their own, at which `--set`
        has divided them.
        """
        for part, item in value.items():
            name = f"{prefix}{part}" if prefix else part
            is_divided = any(field.startswith(f"{name}.") for field in cls.model_fields)
            if is_divided and isinstance(item, dict):
                yield from cls._join_names(item, f"{name}.")
            else:
                yield name, item

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: Any) -> Dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value not in (None, {})}


def join_names(value: Any) -> Any:
    """Return a mapping with the names that `--set` has divided at their dots."""
    return flatten(value) if value and isinstance(value, dict) else value


def make_section(name: str, types: Mapping[str, Any]) -> Any:
    """Return the section of a config with these options: name -> type, see `options.yaml`."""
    fields: Dict[str, Any] = {}
    for key, kind in types.items():
        if isinstance(kind, dict):
            inner = make_section(key, kind)
            fields[key] = (inner, inner())
        else:
            # a list in the file names the values of an enum
            annotation = Literal[tuple(kind)] if isinstance(kind, list) else TYPES[kind]
            fields[key] = (Optional[annotation], None)
    section = create_model(name, __base__=NamedOptions, __module__=__name__, **fields)
    # a config goes to other processes, and pickle finds a class by its name
    globals()[name] = section
    return section


# a type checker cannot see classes that are made at run time
if TYPE_CHECKING:
    Options = Any
    OptimizerOptions = Any
    PopartOptions = Any
else:
    Options = make_section("Options", TABLE["options"])
    OptimizerOptions = make_section("OptimizerOptions", TABLE["optimizer_options"])
    PopartOptions = make_section("PopartOptions", TABLE["popart_options"])


class DataLoading(Section):
    """The loading of a call's input: `sync` loads it at the call; `async` loads it ahead in a
    process of its own and passes it through shared memory (poptorch.AsynchronousDataAccessor)."""

    mode: Literal["sync", "async"] = "sync"
    buffer_size: Count = 3
    miss_sleep_time_in_ms: NotNegative = 0.1
    early_preload: StrictBool = False
    sharing_strategy: Literal["shared_memory", "file_system", "fork", "forkserver"] = "forkserver"


class IpuProfile(Section):
    """The graph and execution profile, `profile.pop` under `directory`. It changes memory and times."""

    directory: Optional[str] = None


class IpuConfig(Section):
    """The keys of backend: {name: poptorch, ipu: {...}}. `options`, `optimizer_options` and
    `popart_options` hold what PopTorch and PopART have by their own names.

    The default of `output_mode` differs from PopTorch's, `final`, which would report only the loss
    of a batch's last microbatch. docs/reference/ipu.md says what each key means.
    """

    device_iterations: Count = 1
    inference_device_iterations: Optional[Count] = None
    ipus: Optional[List[Whole]] = None
    ipu_ids: Optional[List[Whole]] = None
    auto_round_num_ipus: StrictBool = False
    broadcast_buffers: StrictBool = True
    local: Literal["fused", "decoupled"] = "fused"
    detach_for_evaluation: StrictBool = True

    available_memory_proportion: Annotated[
        Union[None, Proportion, NonEmpty[Proportion]],
        say_allowed(f"{NONE}, a number from 0 to 1, or a list of such numbers, one per IPU"),
    ] = None
    partials: Literal["float", "half"] = "float"
    stochastic_rounding: StrictBool = False
    loss_scaling: Annotated[
        Union[Positive, NonEmpty[Tuple[Whole, Positive]]],
        say_allowed("a number > 0, or [[0, number], [update, number], ...] with rising updates"),
    ] = 1.0
    use_combined_accum: StrictBool = False
    recomputation: Literal["auto", "none", "standard", "norm_only", "pipeline", "recompute_all"] = (
        "auto"
    )
    output_mode: Literal["all", "final", "sum"] = "all"
    data_loading: DataLoading = DataLoading()
    executable_cache: Optional[str] = None
    compile_only: StrictBool = False
    profile: IpuProfile = IpuProfile()
    options: Options = Options()
    optimizer_options: OptimizerOptions = OptimizerOptions()
    engine_options: Annotated[Dict[str, str], BeforeValidator(join_names)] = {}
    popart_options: PopartOptions = PopartOptions()

    @model_validator(mode="before")
    @classmethod
    def _name_other_keys(cls, value: Any) -> Any:
        """Refuse a key of an earlier version, and an option that the library sets itself."""
        keys = flatten(value) if isinstance(value, dict) else {}
        for refused, why in REFUSED.items():
            for key in keys:
                # the dot keeps apart keys of which one begins with the other's name
                if f"{key}.".startswith(f"{refused}."):
                    raise key_fault(key, keys[key], why.replace("VALUE", show_in_config(keys[key])))
        return value

    def list_cases(self) -> Iterator[Case]:
        updates = (
            [pair[0] for pair in self.loss_scaling] if isinstance(self.loss_scaling, list) else [0]
        )
        # a set drops a repeated number, so that it does not count as rising
        rises = updates == sorted({0, *updates})
        yield Case(not rises, "loss_scaling", "its updates must begin with 0 and rise")

    @property
    def is_simulated(self) -> bool:
        """Whether the device is Graphcore's simulator, or only a target to compile for."""
        return bool(self.options.useIpuModel or self.options.useOfflineIpuTarget)

    @property
    def streams_state(self) -> bool:
        """Whether the optimizer's state is in streaming memory; with `use_combined_accum` there is
        none.
        """
        location = self.options.TensorLocations.setOptimizerLocation
        return location.useOnChipStorage is False and not self.use_combined_accum

    def stream_state(self) -> IpuConfig:
        """Return the section with the optimizer's state in streaming memory."""
        location = {"TensorLocations.setOptimizerLocation": {"useOnChipStorage": False}}
        # validated anew, because a copy would take the name with dots as a field
        options = type(self.options).model_validate({**self.options.model_dump(), **location})
        return self.model_copy(update={"options": options, "use_combined_accum": False})

    @property
    def changes_loss_scaling(self) -> bool:
        """Whether the loss scaling changes during the run."""
        return isinstance(self.loss_scaling, list)

    def get_loss_scaling(self, update: int) -> float:
        """Return the loss scaling of an update."""
        if not isinstance(self.loss_scaling, list):
            return self.loss_scaling
        return [scaling for first, scaling in self.loss_scaling if first <= update][-1]
