"""The subscriber hosting broker, SHB (spec D3 to D6, D9 to D11)."""
