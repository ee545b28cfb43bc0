{{- define "gpumem.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "gpumem.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpumem.labels" -}}
{{ include "gpumem.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "gpumem.image" -}}
{{- with .Values.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "gpumem.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "gpumem.fullname" .) "" .Values.serviceAccount.create) }}
{{- end }}

{{- /* The web configuration; empty if the port has neither TLS nor users. */}}
{{- define "gpumem.webConfig" -}}
{{- $config := deepCopy (.Values.webConfig | default dict) }}
{{- if or .Values.tls.existingSecret .Values.tls.certificate }}
{{- $files := dict "cert_file" "/etc/gpumem/tls/tls.crt" "key_file" "/etc/gpumem/tls/tls.key" }}
{{- $_ := set $config "tls_server_config" (merge ($config.tls_server_config | default dict) $files) }}
{{- end }}
{{- if $config }}
{{- toYaml $config }}
{{- end }}
{{- end }}

{{- /* The volumes of the files in /etc/gpumem, by folder. The exporter refuses tokens that every user may read. */}}
{{- define "gpumem.files" -}}
{{- $fullname := include "gpumem.fullname" . }}
{{- range $folder, $token := dict "action-token" .Values.actionToken "report-token" .Values.reportToken }}
{{- if or $token.existingSecret $token.value }}
{{ $folder }}:
  secret:
    secretName: {{ $token.existingSecret | default (printf "%s-%s" $fullname $folder) }}
    items: [{key: {{ $token.existingSecret | empty | ternary "token" $token.key }}, path: token}]
    defaultMode: 0440
{{- end }}
{{- end }}
{{- if or .Values.tls.existingSecret .Values.tls.certificate }}
tls:
  secret:
    secretName: {{ .Values.tls.existingSecret | default (printf "%s-tls" $fullname) }}
    defaultMode: 0440
{{- end }}
{{- if include "gpumem.webConfig" . }}
web:
  secret:
    secretName: {{ $fullname }}-web
    defaultMode: 0440
{{- end }}
{{- if .Values.policy }}
policy:
  configMap:
    name: {{ $fullname }}-policy
{{- end }}
{{- end }}

{{- /* Whether requests to the port need a password or a certificate, which kubelets do not have. */}}
{{- define "gpumem.credentialsRequired" -}}
{{- $config := .Values.webConfig | default dict }}
{{- if or $config.basic_auth_users (eq "RequireAndVerifyClientCert" (dig "tls_server_config" "client_auth_type" "" $config)) }}true{{ end }}
{{- end }}

{{- /* How a probe asks for a path: over the port, or over the socket if the port needs credentials. */}}
{{- define "gpumem.probe" -}}
{{- if include "gpumem.credentialsRequired" .root -}}
exec:
  command:
    - python
    - -c
    - |
      import socket, sys
      connection = socket.socket(socket.AF_UNIX)
      connection.settimeout(4)
      connection.connect("/run/gpumem/exporter.sock")
      connection.sendall(b"GET {{ .path }} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
      sys.exit(b" 200 " not in connection.recv(64))
{{- else -}}
httpGet:
  path: {{ .path }}
  port: metrics
  {{- if hasKey (include "gpumem.files" .root | fromYaml) "tls" }}
  scheme: HTTPS
  {{- end }}
{{- end }}
{{- end }}

{{- /* The environment of the exporter. */}}
{{- define "gpumem.environment" -}}
- name: NVIDIA_VISIBLE_DEVICES
  value: all
- name: NVIDIA_DRIVER_CAPABILITIES
  value: utility
# A folder that the exporter creates with mode 0700; the folder of the kubelet is readable by every user.
- name: GPUMEM_STORAGE_PATH
  value: /var/lib/gpumem/events
{{- if .Values.socket.hostPath }}
# The client for jobs that mount the folder, as PYTHONPATH.
- name: GPUMEM_CLIENT_DIRECTORY
  value: /run/gpumem/client
{{- end }}
{{- $paths := dict "action-token" "token" "report-token" "token" "web" "web-config.yml" "policy" "policy.yml" }}
{{- $variables := dict "action-token" "ACTION_TOKEN" "report-token" "REPORT_TOKEN" "web" "WEB_CONFIG" "policy" "POLICY" }}
{{- range $folder := keys (include "gpumem.files" . | fromYaml | default dict) | sortAlpha }}
{{- if ne $folder "tls" }}
- name: GPUMEM_{{ get $variables $folder }}_FILE
  value: /etc/gpumem/{{ $folder }}/{{ get $paths $folder }}
{{- end }}
{{- end }}
{{- range $key, $value := .Values.settings }}
- name: {{ printf "GPUMEM_%s" ($key | replace "." "_" | replace "-" "_" | upper) }}
  {{- if kindIs "slice" $value }}
  value: {{ join "," $value | quote }}
  {{- else }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* The user of the exporter if it is not root; otherwise empty. */}}
{{- define "gpumem.user" -}}
{{- $context := .Values.securityContext | default dict }}
{{- with $context.runAsUser }}
{{- printf "%d:%d" (int .) (int ($context.runAsGroup | default .)) }}
{{- end }}
{{- end }}

{{- /* The URL of the live page of a node. */}}
{{- define "gpumem.livePageUrl" -}}
{{- $scheme := hasKey (include "gpumem.files" . | fromYaml) "tls" | ternary "https" "http" }}
{{- $port := .Values.hostPort | default (ternary 9844 0 .Values.hostNetwork) | int }}
{{- .Values.dashboards.livePageUrl | default (printf "%s://{node}%s/" $scheme (ternary (printf ":%d" $port) "" (ne $port 0))) }}
{{- end }}

{{- /* Ends the rendering for values that contradict each other, before a pod is replaced. */}}
{{- define "gpumem.check" -}}
{{- range $name := list "actionToken" "reportToken" }}
{{- with index $.Values $name }}
{{- if and .existingSecret .value }}
{{- fail (printf "%s: existingSecret and value are both set; set one of them" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.tls.existingSecret .Values.tls.certificate }}
{{- fail "tls: existingSecret and certificate are both set; set one of them" }}
{{- end }}
{{- if and .Values.prometheusRule.enabled (not .Values.monitor.kind) (not .Values.monitor.sidecars) (not .Values.prometheusRule.withoutMonitor) }}
{{- fail "prometheusRule: the rules select the job gpumem, which monitor.kind creates; without it, a critical alert fires for ever. Set monitor.kind, or prometheusRule.withoutMonitor if your Prometheus has a job of that name" }}
{{- end }}
{{- $settings := merge (deepCopy (.Values.settings | default dict)) (dict "report.expiry" 15.0 "report.interval" 1.0) }}
{{- $expiry := index $settings "report.expiry" | float64 }}
{{- $interval := index $settings "report.interval" | float64 }}
{{- if lt $expiry (mulf 2 $interval) }}
{{- fail (printf "settings: report.expiry %v must be at least twice report.interval (%v)" $expiry $interval) }}
{{- end }}
{{- if and .Values.processDetails (include "gpumem.user" .) }}
{{- fail "processDetails: needs securityContext.runAsUser 0, because Kubernetes gives capabilities to root only" }}
{{- end }}
{{- if and .Values.hostNetwork (not (has (int .Values.hostPort) (list 0 9844))) }}
{{- fail "hostNetwork: the port of the node is 9844; leave out hostPort" }}
{{- end }}
{{- if and .Values.hostNetwork .Values.networkPolicy.enabled }}
{{- fail "networkPolicy: has no effect on pods with hostNetwork; use hostPort, or a firewall of the nodes" }}
{{- end }}
{{- end }}

{{- define "gpumem.testLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
