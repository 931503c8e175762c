"""When each stage does which pass, and which weight version it reads: schedules as data, without torch.

    actions             the kinds of actions, and the passes that each one needs
    methods             the table of methods: pipeline, versions read, updates
    timelines           the schedule of a method, by closed forms under drawings
    orders              by each device's order of passes; planned_orders: orders that depend on durations
    rows                schedules from rows by hand or CSV, and as text
    runs, table         the compact form of a schedule; `Schedule`, which proves that it can run
    versions            the weight versions that passes read, their lags, copies of the weights
    delays              delays that a method states; global_history: those of a schedule in the history of all stages
    drawing, colours    schedules and versions in a notebook
    clock               when passes start and end, from the durations of passes and messages
"""
