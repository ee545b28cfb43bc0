// Dashboards, recording rules and alerts as a monitoring mixin. It imports the files of grafana/dashboards and
// deploy/prometheus/rules, so a vendored copy needs the whole repository:
//
//   jb install github.com/gpumem-exporter/gpumem-exporter@main
//   (import 'gpumem-exporter/deploy/mixin/mixin.libsonnet') + { _config+:: { runbookURL: 'https://wiki.example/runbooks/' } }
local alerts = std.parseYaml(importstr '../prometheus/rules/alerts.yml');
local recording = std.parseYaml(importstr '../prometheus/rules/recording.yml');

{
  _config+:: {
    // The folder of the runbooks, with the final slash. null keeps the URLs of the rules.
    runbookURL: null,
    // The URL at which a browser reaches the live page of a node; `{node}` is the label `instance`.
    livePageURL: 'http://{node}/',
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
    'gpumem-workload.json': withLivePage(import '../../grafana/dashboards/workload.json'),
  },

  local folder = $._config.runbookURL,
  local withRunbook(rule) =
    if folder == null then rule
    else rule { annotations+: { runbook_url: folder + rule.alert + '.md' } },

  prometheusAlerts+:: {
    groups+: [group { rules: std.map(withRunbook, group.rules) } for group in alerts.groups],
  },

  prometheusRules+:: {
    groups+: recording.groups,
  },
}
