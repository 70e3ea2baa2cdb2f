"""What clients send: publishes, subscriptions, requests."""
