"""Ticks, knowledge and curiosity: the one stream protocol."""
