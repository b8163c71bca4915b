"""Programs for chips of the scheduled network, with real numbers: :mod:`.program` builds them."""
