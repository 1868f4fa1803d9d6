"""The processes of a job: how they start, find each other, talk, and notice who is gone."""
