"""Files of other programs: models that come in, models, figures and tables that go out."""
