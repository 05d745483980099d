"""Traffic: codes cut into chunks as a connector delivers them, services that play them, and logs of services elsewhere.

Three sources of one kind of table, calls by exact shape: a service that decodes (:func:`simulate_service`), a long run that
only counts (:func:`simulate_traffic`), and what a production server wrote (:func:`read_log`).
"""

from .arrivals import AllAtOnce, Arrivals, BurstyArrivals, PoissonArrivals, RampArrivals, TraceArrivals
from .importers import ImportedLog, read_log
from .lengths import LengthDistribution, RequestShape, draw_shapes, shapes_of
from .records import ServiceResult, ServiceSummary
from .routing import RoutingRules, TrafficCall
from .schedules import PlannedChunk, ScheduledChunk, chunk_plan, chunk_schedule, chunk_sizes
from .service import ChunkRunner, simulate_service
from .simulation import TRAFFIC_COLUMNS, TrafficResult, linear_cost, simulate_traffic
from .traffic import RequestKind, ServiceRequest, draw_requests

__all__ = [
    "TRAFFIC_COLUMNS",
    "AllAtOnce",
    "Arrivals",
    "BurstyArrivals",
    "ChunkRunner",
    "ImportedLog",
    "LengthDistribution",
    "PlannedChunk",
    "PoissonArrivals",
    "RampArrivals",
    "RequestKind",
    "RequestShape",
    "RoutingRules",
    "ScheduledChunk",
    "ServiceRequest",
    "ServiceResult",
    "ServiceSummary",
    "TraceArrivals",
    "TrafficCall",
    "TrafficResult",
    "chunk_plan",
    "chunk_schedule",
    "chunk_sizes",
    "draw_requests",
    "draw_shapes",
    "linear_cost",
    "read_log",
    "shapes_of",
    "simulate_service",
    "simulate_traffic",
]
