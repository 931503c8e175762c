"""The config section `backend.ipu`: all settings of a run on Graphcore IPUs. This file imports
neither torch nor PopTorch.

Source: PopTorch, branch sdk-release-3.4 (poptorch/python/options.py).
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

from pydantic import Field, StrictBool
from typing_extensions import Annotated, Literal

from ipu_pipe.config.values import (
    NUMBER,
    Case,
    Count,
    Integer,
    NonEmpty,
    NotNegative,
    Positive,
    Section,
    Whole,
    say_allowed,
)
from ipu_pipe.refusals import NONE

# a share of an IPU's memory
Proportion = Annotated[float, Field(ge=0, le=1), NUMBER]
LOCATIONS = ("activation", "weight", "optimizer", "accumulator")


class TensorLocation(Section):
    """The memory of the tensors of one class (poptorch.TensorLocationSettings); null leaves the
    choice to PopTorch.
    """

    on_chip: Optional[StrictBool] = None
    replicated_tensor_sharding: StrictBool = False
    min_elements_for_off_chip: Optional[Whole] = None
    min_elements_for_replicated_tensor_sharding: Optional[Whole] = None
    io_tiles_to_load: StrictBool = False
    io_tiles_to_store: StrictBool = False


class TensorLocations(Section):
    """The settings of Options.TensorLocations. `num_io_tiles`: tiles of each IPU that are reserved
    for input and output.
    """

    activation: TensorLocation = TensorLocation()
    weight: TensorLocation = TensorLocation()
    optimizer: TensorLocation = TensorLocation()
    accumulator: TensorLocation = TensorLocation()
    num_io_tiles: Optional[Annotated[Integer, Field(ge=32, le=192, multiple_of=2)]] = None


class DataLoading(Section):
    """The loading of a call's input: `sync` loads it at the call; `async` loads it ahead in a
    process of its own and passes it through shared memory (poptorch.AsynchronousDataAccessor)."""

    mode: Literal["sync", "async"] = "sync"
    buffer_size: Count = 3
    miss_sleep_time_in_ms: NotNegative = 0.1
    early_preload: StrictBool = False
    sharing_strategy: Literal["shared_memory", "file_system", "fork", "forkserver"] = "forkserver"


class IpuProfile(Section):
    """The profiles: graph and execution profile (`profile.pop`) under `directory`, system trace
    (`.pvti`) under `pvti`.

    A full profile changes memory and times. `blocks` limits it to Block programs whose names match
    (PopVision's lightweight profile).
    """

    directory: Optional[str] = None
    pvti: Optional[str] = None
    blocks: Optional[str] = None


class IpuConfig(Section):
    """The keys of backend: {name: poptorch, ipu: {...}}. Most are poptorch.Options under their own
    names with their defaults.

    The default of `output_mode` differs: PopTorch's default, `final`, would report only the loss of
    a batch's last microbatch. docs/reference/ipu.md says what each key means.
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
    floating_point_exceptions: StrictBool = False
    stable_norm: StrictBool = False
    convolution_dithering: StrictBool = False
    loss_scaling: Annotated[
        Union[Positive, NonEmpty[Tuple[Whole, Positive]]],
        say_allowed("a number > 0, or [[0, number], [update, number], ...] with rising updates"),
    ] = 1.0
    automatic_loss_scaling: StrictBool = False
    mean_reduction_strategy: Literal["post", "running", "post_and_loss"] = "post"
    use_combined_accum: StrictBool = False
    accum_type: Literal["float32", "float16"] = "float32"
    velocity_accum_type: Literal["float32", "float16"] = "float32"
    first_order_momentum_accum_type: Literal["float32", "float16"] = "float32"
    second_order_momentum_accum_type: Literal["float32", "float16"] = "float32"

    recomputation: Literal["auto", "none", "standard", "norm_only", "pipeline", "recompute_all"] = (
        "auto"
    )
    tensor_locations: TensorLocations = TensorLocations()
    overlapped_io: Literal["none", "accumulation_loop", "device_iteration_loop"] = "none"
    prefetch_buffering_depth: Optional[Count] = None

    output_mode: Literal["all", "final", "sum", "every_n"] = "all"
    output_return_period: Count = 1
    data_loading: DataLoading = DataLoading()
    synthetic_data: StrictBool = False

    executable_cache: Optional[str] = None
    compile_only: StrictBool = False
    use_ipu_model: StrictBool = False
    offline_target: Optional[Literal[1, 2, 21]] = None
    connection_type: Literal["always", "on_demand"] = "always"
    wait_for_ipu: StrictBool = False
    sync_pattern: Literal["full", "single_pipeline", "replica_and_ladder"] = "full"
    progress_bar: StrictBool = True

    log_cycle_count: StrictBool = False
    profile: IpuProfile = IpuProfile()
    engine_options: Dict[str, str] = {}
    popart_options: Dict[str, Any] = {}

    def list_cases(self) -> Iterator[Case]:
        updates = (
            [pair[0] for pair in self.loss_scaling] if isinstance(self.loss_scaling, list) else [0]
        )
        rises = updates == sorted({0, *updates})
        yield Case(not rises, "loss_scaling", "its updates must begin with 0 and rise")

    @property
    def changes_loss_scaling(self) -> bool:
        """Whether the loss scaling changes during the run."""
        return isinstance(self.loss_scaling, list)

    def get_loss_scaling(self, update: int) -> float:
        """Return the loss scaling of an update."""
        if not isinstance(self.loss_scaling, list):
            return self.loss_scaling
        return [scaling for first, scaling in self.loss_scaling if first <= update][-1]
