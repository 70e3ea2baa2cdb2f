"""What a broker publishes about itself on `$postroad/...` (spec P4)."""
