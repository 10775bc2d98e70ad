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

{{/* Name of the Lease of the load balancer controller: that of the class, if a Lease may have it, else one with a hash of the class.
     The agent computes the same name (`lease_name`). */}}
{{- define "lb-agent.lease" -}}
{{- $label := "[a-z0-9]([-a-z0-9]*[a-z0-9])?" -}}
{{- with .Values.loadBalancerController.class -}}
{{- $name := printf "lb-agent-addresses-%s" (. | replace "/" "." | lower) -}}
{{- if and (le (len $name) 253) (regexMatch (printf "^%s(\\.%s)*$" $label $label) $name) -}}
{{ $name }}
{{- else -}}
lb-agent-addresses-{{ . | sha256sum | trunc 16 }}
{{- end -}}
{{- else -}}
lb-agent-addresses
{{- end -}}
{{- end -}}
