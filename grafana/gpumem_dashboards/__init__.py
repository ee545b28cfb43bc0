"""The Grafana dashboards as code, and what reads them back: their queries, and a plain rendering of the answers."""
