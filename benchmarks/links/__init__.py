"""What communication between ranks takes on slow links: the parts of bench_links.py."""
