def compare_ne(options): raise SystemExit("soon")
