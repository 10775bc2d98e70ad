{{- define "lb-agent.selector" -}}
app.kubernetes.io/name: lb-agent
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lb-agent.labels" -}}
{{ include "lb-agent.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: service-proxy
{{- end }}

{{/* Not empty if the agent answers DNS queries at addresses of its own. */}}
{{- define "lb-agent.bindsDns" -}}
{{- range list "dns-bind-address" "dnsBindAddress" -}}
{{- if get $.Values.config . }}true{{ end -}}
{{- end -}}
{{- end -}}

{{/* Not empty if the settings make the agent a DNS server. */}}
{{- define "lb-agent.answersDns" -}}
{{- include "lb-agent.bindsDns" . -}}
{{- range list "dns-intercept" "dnsIntercept" -}}
{{- if get $.Values.config . }}true{{ end -}}
{{- end -}}
{{- end -}}
