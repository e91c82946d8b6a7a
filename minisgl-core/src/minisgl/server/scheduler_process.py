"""The scheduler process: the composition root behind ZMQ sockets."""

from minisgl.message.sockets import Addresses
from minisgl.message.status import StatusSender
from minisgl.settings import Settings


def scheduler_main(settings: Settings, addresses: Addresses, status: StatusSender) -> None:
    """Build the scheduler, serve until ``Shutdown``, close the sockets.

    Raises:
        ModelLoadError, DoesNotFitError, PluginError: the start fails.
    """
    status.starting("loading the model")
    from minisgl.bootstrap import build_scheduler
    from minisgl.scheduler.zmq_transport import ZmqTransport

    transport = ZmqTransport(addresses)
    scheduler = build_scheduler(settings, transport, progress=True)
    status.ready({"max_seq_len": scheduler.info.max_seq_len})
    try:
        scheduler.run()
    finally:
        transport.close()
