"""Events, and helpers of programs that use the package."""

from .event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
