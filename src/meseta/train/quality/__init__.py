"""Whether one config learns more than another: `meseta quality`, over worlds or datasets, configs and seeds."""
