"""Best effort with end-to-end repair: what receivers missed is found out, asked for and sent again."""
