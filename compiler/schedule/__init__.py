"""What follows the choice: memory, order, dispatches, and the plan that a runtime executes."""
