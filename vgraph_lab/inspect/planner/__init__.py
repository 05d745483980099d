"""Which sizes to capture: from traffic and costs to the whole front of choices, a recommendation and a configuration."""

from .costs import COST_COLUMNS, complete_costs, cost_table, costs_of_entries, measure_costs
from .export import replay_traffic
from .forecast import Forecaster, traffic_from
from .free_form import FreeForm
from .grids import StatelessGrid, StreamingGrid, space_of
from .outcome import compare_outcome, resolve_traffic
from .plan import FRONT_COLUMNS, PREDICTION_COLUMNS, Plan, PlanPoint, plan_captures
from .spaces import Choice
from .traffic import TRAFFIC_COLUMNS, read_traffic_csv, traffic_of, traffic_of_calls, traffic_table, with_schedule

__all__ = [
    "COST_COLUMNS",
    "FRONT_COLUMNS",
    "PREDICTION_COLUMNS",
    "TRAFFIC_COLUMNS",
    "Choice",
    "Forecaster",
    "FreeForm",
    "Plan",
    "PlanPoint",
    "StatelessGrid",
    "StreamingGrid",
    "compare_outcome",
    "complete_costs",
    "cost_table",
    "costs_of_entries",
    "measure_costs",
    "plan_captures",
    "read_traffic_csv",
    "replay_traffic",
    "resolve_traffic",
    "space_of",
    "traffic_from",
    "traffic_of",
    "traffic_of_calls",
    "traffic_table",
    "with_schedule",
]
