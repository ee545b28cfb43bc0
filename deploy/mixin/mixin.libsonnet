// Dashboards, recording rules and alerts as a monitoring mixin. It imports the files of grafana/dashboards and
// deploy/prometheus/rules, so a vendored copy needs the whole repository:
//
//   jb install github.com/gpumem-exporter/gpumem-exporter@main
//   (import 'gpumem-exporter/deploy/mixin/mixin.libsonnet') + { _config+:: { runbookURL: 'https://wiki.example/runbooks/' } }
local alerts = std.parseYaml(importstr '../prometheus/rules/alerts.yml');
local recording = std.parseYaml(importstr '../prometheus/rules/recording.yml');
local coverage = std.parseYaml(importstr '../prometheus/rules/optional/coverage.yml');
local inactive = std.parseYaml(importstr '../prometheus/rules/optional/inactive.yml');
local kvCache = std.parseYaml(importstr '../prometheus/rules/optional/kv-cache.yml');

{
  _config+:: {
    // The folder of the runbooks, with the final slash. null: the pages of the exporters, below livePageURL.
    runbookURL: null,
    // The URL at which a browser reaches the live page of a node; `{node}` is the label `instance`.
    livePageURL: 'http://{node}/',
    // The labels that tell clusters apart, such as 'region, cluster'.
    clusterLabels: 'cluster',
    // Whether there is an alert on nodes where much memory belongs to processes that do not report.
    coverageAlert: false,
    // Whether there is an alert on processes that hold much memory and have done nothing for four hours.
    inactiveAlert: false,
    // Whether there is an alert on inference engines with a much larger key-value cache than they need.
    kvCacheAlert: false,
  },

  local live = std.split($._config.livePageURL, '{node}'),
  local values = { live_page: live[0], live_page_end: live[1] },
  local withLivePage(dashboard) = dashboard {
    templating+: {
      list: [
        variable + (if variable.name in values then { query: values[variable.name] } else {})
        for variable in super.list
      ],
    },
  },

  grafanaDashboards+:: {
    'gpumem-exporter.json': withLivePage(import '../../grafana/dashboards/exporter.json'),
    'gpumem-fleet.json': withLivePage(import '../../grafana/dashboards/fleet.json'),
    'gpumem-node.json': withLivePage(import '../../grafana/dashboards/node.json'),
    'gpumem-oom.json': withLivePage(import '../../grafana/dashboards/oom.json'),
    'gpumem-usage.json': withLivePage(import '../../grafana/dashboards/usage.json'),
    'gpumem-workload.json': withLivePage(import '../../grafana/dashboards/workload.json'),
  },

  local inClusters(rule) = rule {
    expr: std.strReplace(rule.expr, '(cluster, ', '(' + $._config.clusterLabels + ', '),
  },
  local folder = $._config.runbookURL,
  local withRunbook(rule) = inClusters(rule) {
    annotations+: {
      runbook_url:
        if folder != null then folder + rule.alert + '.md'
        else std.strReplace(std.strReplace(super.runbook_url, 'http://{{', live[0] + '{{'), '}}/', '}}' + live[1]),
    },
  },

  prometheusAlerts+:: {
    groups+: [
      group { rules: std.map(withRunbook, group.rules) }
      for group in
        alerts.groups
        + (if $._config.coverageAlert then coverage.groups else [])
        + (if $._config.inactiveAlert then inactive.groups else [])
        + (if $._config.kvCacheAlert then kvCache.groups else [])
    ],
  },

  prometheusRules+:: {
    groups+: [group { rules: std.map(inClusters, group.rules) } for group in recording.groups],
  },
}
