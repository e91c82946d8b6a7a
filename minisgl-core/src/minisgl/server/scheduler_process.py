"""The scheduler process: the composition root behind ZMQ sockets."""

from minisgl.message.sockets import Addresses
from minisgl.message.status import StatusSender
from minisgl.plugins.host import Fingerprint
from minisgl.processes import collector_at_rest
from minisgl.settings import Settings


def scheduler_main(
    settings: Settings,
    addresses: Addresses,
    status: StatusSender,
    *,
    expected_plugins: Fingerprint | None = None,
) -> None:
    """Build the scheduler, serve until ``Shutdown``, close the sockets.

    Args:
        settings: everything, models and tokenizers by local paths.
        addresses: of all sockets.
        status: tells the supervisor how far the start has come.
        expected_plugins: what the process that started this one has loaded.

    Raises:
        PluginError: this process sees other plugins, or a chosen one cannot run.
        ModelLoadError, DoesNotFitError: the start fails.
        EngineLostError: another rank of the engine has ended or hangs.
    """
    status.starting("loading the model")
    from minisgl.bootstrap import build_scheduler, load_host
    from minisgl.scheduler.zmq_transport import ZmqTransport

    host = load_host(settings)
    if expected_plugins is not None:
        host.check_fingerprint(expected_plugins)
    transport = ZmqTransport(addresses)
    status.num_dropped = lambda: transport.num_dropped
    scheduler = build_scheduler(
        settings, transport, host, max_queued_tokens=settings.server.max_queued_tokens
    )
    try:
        with collector_at_rest():
            status.ready({"max_seq_len": scheduler.info.max_seq_len})
            scheduler.run()
    finally:
        scheduler.close()
        transport.close()
