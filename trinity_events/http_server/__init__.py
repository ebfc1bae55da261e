"""HTTP server of the faces that listen at a port: the dashboard and the metrics.

It is uvicorn, with bounds on connections that uvicorn does not have: see
:mod:`~trinity_events.http_server.connections`.
"""
