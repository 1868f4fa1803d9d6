"""What a run has recorded, and the page that shows where its time went."""
