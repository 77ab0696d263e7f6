"""Define Horovod as the framework of compressors."""

from __future__ import annotations

from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.connection import use_framework
from hvd_adaptive.hooks.horovod import elastic
from hvd_adaptive.hooks.horovod.session import Session


class HorovodFramework:
    """Connect compressors to Horovod; see connection.Framework."""

    def constructed(self, compressor: GradientCompressor) -> None:
        """Register the handler of compressors' states with elastic Horovod, if it is imported."""
        elastic.register()

    def connect(self, compressor: GradientCompressor) -> Session:
        """Return a new session of ``compressor``."""
        return Session(compressor)


def plug_in() -> None:
    """Make Horovod's calls of ``compress`` reach sessions."""
    use_framework(HorovodFramework())
