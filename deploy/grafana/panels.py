"""The kinds of panels in the dashboards, with a common style.

Queries are filtered by the dashboards' variable `model`. `{m}` in an expression stands for that filter, which keeps the
braces of PromQL readable.
"""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models

DATA_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
WINDOW = "$__rate_interval"
MODEL = 'model_name=~"$model"'
TAGS = ["quire"]

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
HEIGHT = 8
WIDTHS = {"third": 8, "half": 12, "two thirds": 16, "tile": 4, "small tile": 3}


def dashboard_named(title: str, uid: str, text: str) -> dashboard.Dashboard:
    """Returns an empty dashboard with the variables `datasource` and `model` and links to the other dashboards."""
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(text)
        .tags(TAGS)
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-30m", "now")
        .refresh("5s")
        .timezone("browser")
        .link(
            dashboard.DashboardLink("Quire")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(TAGS)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("model")
            .label("Model")
            .datasource(DATA_SOURCE)
            .query("label_values(quire_requests_running, model_name)")
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .current(models.VariableOption(text="All", value="$__all"))
        )
    )


def choice(name: str, label: str, values: Sequence[str], chosen: str) -> dashboard.CustomVariable:
    """Returns a variable that is one of `values`."""
    return (
        dashboard.CustomVariable(name)
        .label(label)
        .values(",".join(values))
        .options([models.VariableOption(selected=value == chosen, text=value, value=value) for value in values])
        .current(models.VariableOption(selected=True, text=chosen, value=chosen))
        .allow_custom_value(False)
    )


def lines(
    title: str,
    text: str,
    queries: Mapping[str, str],
    unit: str,
    *,
    width: str = "third",
    stacked: bool = False,
    most: float | None = None,
    exemplars: bool = False,
) -> timeseries.Panel:
    """Returns a panel of curves over time.

    queries    expressions by their legend
    exemplars  also show single requests, as dots with their request id
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(DATA_SOURCE)
        .unit(unit)
        .min(0)
        .height(HEIGHT)
        .span(WIDTHS[width])
        .line_width(1)
        .fill_opacity(40 if stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if most is not None:
        panel = panel.max(most)
    for letter, (legend, expression) in zip("ABCDEFGH", queries.items(), strict=False):
        query = _query(letter, legend, expression)
        panel = panel.with_target(query.exemplar(True) if exemplars else query)
    return panel


def bars(title: str, text: str, queries: Mapping[str, str], unit: str) -> bargauge.Panel:
    """Returns a panel with the current value of each query as a bar; without data it has none."""
    panel = (
        bargauge.Panel()
        .title(title)
        .description(text)
        .datasource(DATA_SOURCE)
        .unit(unit)
        .min(0)
        .height(HEIGHT)
        .span(WIDTHS["third"])
        .orientation(common_models.VizOrientation.HORIZONTAL)
        .display_mode(common_models.BarGaugeDisplayMode.BASIC)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    )
    for letter, (legend, expression) in zip("ABCDEFGH", queries.items(), strict=False):
        panel = panel.with_target(_query(letter, legend, expression, is_instant=True))
    return panel


def heat_map(title: str, text: str, histogram: str, unit: str) -> heatmap.Panel:
    """Returns a heat map of a histogram: the distribution of its observations over the buckets, over time."""
    return (
        heatmap.Panel()
        .title(title)
        .description(text)
        .datasource(DATA_SOURCE)
        .height(HEIGHT)
        .span(WIDTHS["half"])
        .calculate(False)
        .cell_gap(1)
        .y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(common_models.AxisPlacement.LEFT))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Viridis")
            .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
        )
        .with_target(
            _query("A", "{le}", f"sum by (le) (rate({histogram}_bucket{{m}}[{WINDOW}]))").format("heatmap")  # type: ignore[arg-type]  # an enum of strings
        )
    )


def tile(
    title: str,
    text: str,
    expression: str,
    unit: str,
    *,
    bad_from: float | None = None,
    good_from: float | None = None,
    width: str = "tile",
) -> stat.Panel:
    """Returns a panel with one number; red from `bad_from` on, or below `good_from`.

    It asks for the present only. The last number of the past would stay when the service is gone.
    """
    steps = [models.Threshold(value=None, color="green" if good_from is None else "red")]
    if bad_from is not None:
        steps.append(models.Threshold(value=bad_from, color="red"))
    if good_from is not None:
        steps.append(models.Threshold(value=good_from, color="green"))
    return (
        stat.Panel()
        .title(title)
        .description(text)
        .datasource(DATA_SOURCE)
        .unit(unit)
        .height(4)
        .span(WIDTHS[width])
        .thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .with_target(_query("A", title, expression, is_instant=True))
    )


def percentiles(histogram: str) -> dict[str, str]:
    """Returns a query for each of the PERCENTILES of a histogram."""
    return {
        name: f"histogram_quantile({share}, sum by (le) (rate({histogram}_bucket{{m}}[{WINDOW}])))"
        for name, share in PERCENTILES.items()
    }


def per_second(counter: str, *by: str) -> str:
    """Returns a query for the rate of a counter, summed over all labels except `by`."""
    grouping = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouping} (rate({counter}{{m}}[{WINDOW}]))"


def attainment(histogram: str, variable: str) -> str:
    """Returns a query for the share of a histogram's observations up to the bound that a variable names."""
    good = f'sum (rate({histogram}_bucket{{m, le=~"${variable}"}}[{WINDOW}]))'
    return f"{good} / sum (rate({histogram}_count{{m}}[{WINDOW}]))"


def _query(letter: str, legend: str, expression: str, *, is_instant: bool = False) -> prometheus.Dataquery:
    """Returns one query of a panel. A label in the legend is written as {label}."""
    query = (
        prometheus.Dataquery()
        .ref_id(letter)
        .datasource(DATA_SOURCE)
        .expr(expression.replace("{m", "{" + MODEL))
        .legend_format(legend.replace("{", "{{").replace("}", "}}"))
    )
    return query.instant() if is_instant else query.range()
