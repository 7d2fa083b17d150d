"""Reports of the optimizer about itself: the branch of each parameter, the reason, the kernel and the cost."""

from .brief import brief
from .routes import Explanation, Route, explanation_of, route_in_group

__all__ = ["Explanation", "Route", "brief", "explanation_of", "route_in_group"]
