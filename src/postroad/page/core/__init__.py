"""What views show, from what brokers answer. No I/O and no clock: times are arguments, in seconds."""
