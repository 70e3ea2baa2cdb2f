"""The views, a file each: `build(viewer)` makes the elements and says how they are refreshed."""
