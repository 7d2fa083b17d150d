"""What the optimizer says of itself: where each parameter goes and why, what it runs on, what it costs."""

from .brief import brief
from .routes import Explanation, Route, explanation_of, route, route_in_group

__all__ = ["Explanation", "Route", "brief", "explanation_of", "route", "route_in_group"]
