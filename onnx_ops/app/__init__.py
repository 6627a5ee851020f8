"""Operations on a project: check, plan and run its pipelines, release and measure its models."""
