"""Parts of bench_links.py: communication between ranks over slow links."""
