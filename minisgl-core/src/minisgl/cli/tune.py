"""``minisgl tune NAME``: measure what a model runs fastest with here, and keep the answer."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.cli.bench.numbers import number, numbers
from minisgl.cli.flags import add_settings_arguments
from minisgl.errors import SettingsError
from minisgl.settings import ResolvedSettings

if TYPE_CHECKING:
    from minisgl.plugins.host import PluginHost
    from minisgl.plugins.records import BackendQuery

_MOE = "search for the fastest launches of a model's experts on this GPU; needs only its config"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what can be tuned, and its flags."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="moe")
    moe = actions.add_parser(
        "moe", help=_MOE, description=f"{_MOE[0].upper()}{_MOE[1:]}.", allow_abbrev=False
    )
    moe.add_argument(
        "--tokens", type=numbers, metavar="N,...",
        help="tokens of a launch to tune for (default: powers of 2 up to the largest prefill)",
    )  # fmt: skip
    moe.add_argument(
        "--folder", type=Path, metavar="PATH",
        help="where to write the file (default: where the backend looks for it)",
    )  # fmt: skip
    moe.add_argument(
        "--time-limit", type=number, metavar="SECONDS",
        help="end the search then, with the best that was found (default: when all is tried)",
    )  # fmt: skip
    add_settings_arguments(
        moe,
        only=(
            "model.path", "model.dtype", "model.cache_dir", "model.load_format", "moe.backend",
            "moe.weights_dtype", "engine.device", "plugins.disabled", "log.level",
        ),
    )  # fmt: skip


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:
    """Search, and print what was found and where it is; reads no weights unless it is told to."""
    from minisgl.bootstrap import load_host
    from minisgl.bootstrap.experts import lack_of_experts, moe_context
    from minisgl.bootstrap.survey import survey
    from minisgl.kernel.jit import JitLoader
    from minisgl.moe import TuneRequest
    from minisgl.plugins.failure import creating
    from minisgl.plugins.selection import select_moe

    settings = resolved.with_defaults({"model.load_format": "dummy"}, "tune moe").settings
    site = survey(settings, load_host(settings))
    context = moe_context(site, JitLoader(site.device))
    if context is None:
        raise SettingsError(
            f"minisgl tune moe is about routed experts: {lack_of_experts(site.config)}; name a "
            "model with experts, and an installed plugin that runs it"
        )
    chosen = select_moe(site.host, site.query, settings.moe.backend, settings.backend_options)
    tune = chosen.record.tune
    if tune is None:
        raise SettingsError(
            f"minisgl tune moe: backend {chosen.choice!r} has nothing to tune; "
            f"{_tunable(site.host, site.query)}, or see: minisgl plugins explain moe --model MODEL"
        )
    request = TuneRequest(
        tokens=args.tokens,
        folder=args.folder,
        time_limit_s=args.time_limit,
        progress=sys.stderr.isatty(),
    )
    with creating("moe", chosen.choice, done="tuned"):
        print(tune(context, chosen.settings, request))
    return 0


def _tunable(host: "PluginHost", query: "BackendQuery") -> str:
    """Name the backends that can be tuned, with what stands against each, and say what to do."""
    from minisgl.plugins.selection import explain_moe

    reasons = {
        f"{row.distribution}:{row.name}": f" ({row.reason})"
        for row in explain_moe(host, query)
        if row.outcome == "refused"
    }
    offers = [offer for offer in host.moe if offer.record.tune is not None]
    if not offers:
        return "backends that have: none is installed; install a plugin that offers one"
    named = ", ".join(f"{offer.name}{reasons.get(offer.qualified, '')}" for offer in offers)
    if all(offer.qualified in reasons for offer in offers):
        return f"backends that have cannot run here: {named}; tune where one can"
    return f"backends that have: {named}. Name one with --moe-backend"
