"""The live web page: one process that asks brokers as every client does, and shows people what they answer.

`core/` is pure: it turns answers into what views show. One `Poller` asks for all viewers, and only while
somebody looks. `views/` has a file per view, `parts/` what views are made of. Nothing here is imported by a
broker; NiceGUI comes with the extra `page`.
"""
