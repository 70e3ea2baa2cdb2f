"""The one stream protocol: ticks, knowledge, curiosity, feeding, delivery (spec D2)."""
