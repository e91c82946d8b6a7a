"""``python run_fake_server.py FOLDER PORT [OPTIONS_JSON]``: a whole server, its engine faked.

Options: ``fake`` goes to the fake scheduler, ``real_text`` chooses the real tokenizer workers,
``real_engine`` the real scheduler, ``silence`` shortens the limits of that name, ``constants`` has
other values for constants of the API server's process, by full name; the other keys are sections of
the settings.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(folder: str, port: str, options: str = "{}") -> int:
    from minisgl.errors import MinisglError
    from minisgl.server.scheduler_process import scheduler_main
    from minisgl.server.supervisor import WorkerTargets, serve
    from minisgl.server.worker_pool import SilenceLimits
    from minisgl.settings import Settings, configure_logging
    from support.fake_scheduler import fake_scheduler_main

    sections = json.loads(options)
    fake = sections.pop("fake", {})
    for name, value in sections.pop("constants", {}).items():
        module, _, constant = name.rpartition(".")
        assert hasattr(import_module(module), constant), name
        setattr(import_module(module), constant, value)
    real_engine = sections.pop("real_engine", False)
    limits = SilenceLimits(**sections.pop("silence", {}))
    scheduler = scheduler_main if real_engine else fake_scheduler_main
    if sections.pop("real_text", False):
        targets = WorkerTargets(scheduler=scheduler)
    else:
        from support.light_text import light_detokenizer_main, light_tokenizer_main

        targets = WorkerTargets(light_tokenizer_main, scheduler, light_detokenizer_main)
    server = {"port": int(port), "drain_timeout": 2.0, **sections.pop("server", {})}
    model = {"path": folder, "served_name": "fake-model", **sections.pop("model", {})}
    options_of_backends = {} if real_engine else {"fake": fake}
    settings = Settings(model=model, server=server, backend_options=options_of_backends, **sections)
    configure_logging(settings.log.level)
    try:
        return serve(
            settings,
            announce=lambda text: print(text, flush=True),  # noqa: T201
            targets=targets,
            limits=limits,
        )
    except MinisglError as error:
        print(f"minisgl: error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
