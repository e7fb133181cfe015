"""Time and cost to a score of whole systems, on virtual clusters (docs/evidence.md)."""
