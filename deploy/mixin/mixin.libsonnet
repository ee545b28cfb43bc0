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
  },

  grafanaDashboards+:: {
    'gpumem-exporter.json': import '../../grafana/dashboards/exporter.json',
    'gpumem-fleet.json': import '../../grafana/dashboards/fleet.json',
    'gpumem-node.json': import '../../grafana/dashboards/node.json',
    'gpumem-oom.json': import '../../grafana/dashboards/oom.json',
    'gpumem-workload.json': import '../../grafana/dashboards/workload.json',
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
