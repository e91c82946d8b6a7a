"""What is on offer. Imports neither torch nor Triton."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from minisgl.plugins import Capabilities, MoeBackendRecord, hookimpl
from minisgl_moe_triton.probe import probe
from minisgl_moe_triton.settings import TritonMoeSettings

if TYPE_CHECKING:
    from minisgl.moe import MoeBackend, MoeContext, TuneRequest


def _create(context: "MoeContext", settings: TritonMoeSettings) -> "MoeBackend":
    from minisgl_moe_triton.create import create_backend

    return create_backend(context, settings)


def _tune(context: "MoeContext", settings: TritonMoeSettings, request: "TuneRequest") -> str:
    from minisgl_moe_triton.tune import tune

    return tune(context, settings, request)


@hookimpl
def minisgl_moe_backends() -> Iterable[MoeBackendRecord[Any]]:
    """Offer the backend ``triton``."""
    return [
        MoeBackendRecord(
            name="triton",
            summary="Grouped products in Triton with tuned tiles, on NVIDIA GPUs",
            settings_type=TritonMoeSettings,
            probe=probe,
            create=_create,
            tune=_tune,
            weights_dtypes=("float8_e4m3fn",),
            capabilities=Capabilities(
                dtypes=("bfloat16", "float16"),
                devices=("cuda",),
                min_compute_capability=(8, 0),
                cuda_graphs=True,
            ),
        )
    ]
