"""Operations on a project.

They check, plan and run its pipelines, and release and measure its models.
"""
