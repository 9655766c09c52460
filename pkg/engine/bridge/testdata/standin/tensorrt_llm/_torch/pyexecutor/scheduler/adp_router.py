"""Where the real package keeps its routers, and where callers look for their abilities."""
from ...._routing import ConversationAwareADPRouter, DefaultADPRouter  # noqa: F401
from ...._switch import HIDE

if "adp_router" in HIDE:
    raise ImportError("stand-in build without adp_router")
