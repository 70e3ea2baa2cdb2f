"""All that passes between a core and a driver: inputs and effects."""
