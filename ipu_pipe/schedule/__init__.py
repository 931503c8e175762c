"""When each stage does which pass, and which weights it reads: schedules as data, without torch.

actions             the kinds of actions, and the passes that each one needs: `Kind`, `Action`
methods             the table of methods: pipeline, versions read, updates: `METHODS`, `Method`
timelines           the schedule of a method, by closed forms under drawings: `make_schedule`
orders              schedules by each device's order of passes
planned_orders      orders that depend on durations
rows                schedules from rows by hand or CSV, and as text: `from_rows`, `format_text`
stretches, table    the compact form, and the schedule made of it: `Schedule`
versions            the versions that passes read, their lags, copies of weights: `VersionTable`
delays              the delays that a method states
global_history      the delays of a schedule in the history of all stages
drawing, colours    schedules and versions in a notebook
clock               when passes start and end, from their durations: `clock`, `Costs`
"""
