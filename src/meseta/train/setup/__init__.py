"""What is there before the first step: tables, model, plan, and whether memory suffices."""
