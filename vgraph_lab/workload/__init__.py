"""Traffic: codes cut into chunks as a connector delivers them, and a simulated service that plays them."""

from .records import ServiceResult, ServiceSummary
from .schedules import ScheduledChunk, chunk_schedule, chunk_sizes
from .service import ChunkRunner, simulate_service
from .traffic import RequestKind, ServiceRequest, draw_requests

__all__ = [
    "ChunkRunner",
    "RequestKind",
    "ScheduledChunk",
    "ServiceRequest",
    "ServiceResult",
    "ServiceSummary",
    "chunk_schedule",
    "chunk_sizes",
    "draw_requests",
    "simulate_service",
]
