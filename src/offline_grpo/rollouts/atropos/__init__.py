"""Rollouts from environments that speak the Atropos protocol."""

from offline_grpo.rollouts.atropos.source import Atropos

__all__ = ["Atropos"]
