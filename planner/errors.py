"""The one error type that is a message to the user."""


class PlannerError(ValueError):
    """Input that cannot be used. The text names the file or field, its value and the fix.

    The command line prints it as one sentence and exits with 2; the engine plugin logs it once
    and steps aside. Anything else that is raised is a bug.
    """
