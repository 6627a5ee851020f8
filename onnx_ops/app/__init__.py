"""Operations on a project.

These operations check, plan and run the project's pipelines, and release and measure its models.
"""
