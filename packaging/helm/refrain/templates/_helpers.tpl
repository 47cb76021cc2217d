{{/* Names leave room for a component and an ordinal within the 63 characters of a label. */}}
{{- define "refrain.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- end }}

{{/* The component that answers: servers of mode plain, workers of mode fleet. */}}
{{- define "refrain.engine" -}}
{{- ternary "worker" "server" (eq .Values.mode "fleet") -}}
{{- end }}

{{/* The component that clients reach. */}}
{{- define "refrain.front" -}}
{{- ternary "gateway" "server" (eq .Values.mode "fleet") -}}
{{- end }}

{{/* Takes (list . COMPONENT). */}}
{{- define "refrain.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Takes (list . COMPONENT). */}}
{{- define "refrain.labels" -}}
{{- $root := index . 0 -}}
{{ include "refrain.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "refrain.serviceAccount" -}}
{{- default (ternary (include "refrain.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end }}

{{/* Takes (list . IMAGE). */}}
{{- define "refrain.image" -}}
{{- $image := index . 1 -}}
image: {{ printf "%s:%s" $image.repository (default (index . 0).Chart.AppVersion $image.tag) | quote }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end }}

{{/* Arguments for a map of options. */}}
{{- define "refrain.options" -}}
{{- range $name, $value := . }}
- {{ printf "--%s=%s" $name (ternary $value (toJson $value) (kindIs "string" $value)) | quote }}
{{- end }}
{{- end }}

{{/* Variables for a map of them. */}}
{{- define "refrain.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* Seconds for which a pod still takes requests while it is being taken out of Services. */}}
{{- define "refrain.preStopSeconds" -}}5{{- end }}

{{/* Seconds until a stopping pod is killed. Takes the seconds of its drain; the last responses have 5 seconds more to be sent. */}}
{{- define "refrain.graceSeconds" -}}
{{- add (include "refrain.preStopSeconds" . | int) (int .) 15 -}}
{{- end }}

{{/* What all containers have. */}}
{{- define "refrain.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* What all pods have. Takes (list . COMPONENT VALUES). */}}
{{- define "refrain.pod" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}{{- $values := index . 2 -}}
serviceAccountName: {{ include "refrain.serviceAccount" $root }}
automountServiceAccountToken: false
# The variables of Services, such as REFRAIN_PORT of one named refrain, would be read as options.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $values.spreadOver }}
topologySpreadConstraints:
{{- range . }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "refrain.selector" (list $root $component) | nindent 8 }}
{{- end }}
{{- end }}
{{- end }}

{{/* Metadata of pods. Takes (list . COMPONENT VALUES). */}}
{{- define "refrain.podMetadata" -}}
{{- $values := index . 2 -}}
labels: {{ include "refrain.labels" (list (index . 0) (index . 1)) | nindent 2 }}
{{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.podAnnotations }}
annotations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The secret that namespaces are derived from, as a variable. */}}
{{- define "refrain.namespaceKey" -}}
{{- with .Values.namespaceKey.secret }}
- name: REFRAIN_NAMESPACE_KEY
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ $.Values.namespaceKey.key }}}
{{- end }}
{{- end }}

{{/* A pod's own address as a variable. Takes the variable's name. */}}
{{- define "refrain.podAddress" -}}
- name: {{ . }}
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
{{- end }}

{{/* What gateways and workers need to find one another. */}}
{{- define "refrain.discovery" -}}
{{- if eq .Values.fleet.discovery "etcd" }}
- name: ETCD_ENDPOINTS
  value: {{ .Values.fleet.etcd.endpoints | quote }}
- name: ETCD_LEASE_TTL
  value: {{ .Values.fleet.etcd.leaseSeconds | quote }}
{{- end }}
{{- end }}

{{- define "refrain.discoveryOptions" -}}
{{- if eq .Values.fleet.discovery "etcd" }}
- --discovery=etcd
- {{ printf "--discovery-namespace=%s" (default (printf "%s-%s" .Release.Namespace (include "refrain.fullname" .)) .Values.fleet.namespace) | quote }}
{{- else }}
- --discovery=none
{{- end }}
{{- end }}

{{- define "refrain.discoverySecret" -}}
{{- if eq .Values.fleet.discovery "etcd" }}
{{- with .Values.fleet.etcd.secret }}
- secretRef: {name: {{ . }}}
{{- end }}
{{- end }}
{{- end }}

{{/* Ports of Dynamo's runtime. Responses come back to the gateway by connections that workers open. */}}
{{- define "refrain.requestPort" -}}9345{{- end }}
{{- define "refrain.responsePort" -}}9346{{- end }}

{{/* Probes by HTTP. Takes the seconds that starting may take. */}}
{{- define "refrain.probes" -}}
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add . 4) 5 }}
readinessProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
lifecycle:
  preStop:
    sleep: {seconds: {{ include "refrain.preStopSeconds" . }}}
{{- end }}
