"""Judging plans by what their devices take with the real operators: whose plan is balanced best."""
