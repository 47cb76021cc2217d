{{/* What pods with a model have in common: servers, workers and a job's runners. */}}

{{/* The container that fetches the model. */}}
{{- define "refrain.engine.init" -}}
{{- if not .Values.model.claim }}
initContainers:
  - name: model
    {{- include "refrain.image" (list . .Values.image) | nindent 4 }}
    args: [pull, {{ .Values.model.name | quote }}]
    {{- with include "refrain.env" .Values.engine.env | trim }}
    env:
      {{- . | nindent 6 }}
    {{- end }}
    {{- with .Values.model.secret }}
    envFrom:
      - secretRef: {name: {{ . }}}
    {{- end }}
    resources:
      requests: {cpu: 100m, memory: 128Mi}
      limits: {memory: 512Mi}
    {{- include "refrain.container" . | nindent 4 }}
    volumeMounts:
      - {name: data, mountPath: /models, subPath: models}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{/* Options that follow from other values. */}}
{{- define "refrain.engine.options" -}}
{{- $disk := printf "%dGiB" (div (mul 4 (int .Values.engine.storage.gib)) 5) -}}
{{- $options := dict "model" .Values.model.name "disk" $disk -}}
{{- with .Values.remote.url }}{{ $_ := set $options "remote" . }}{{ end -}}
{{- toYaml $options -}}
{{- end }}

{{- define "refrain.engine.env" -}}
# Without a limit on CPUs the program would take all that the node has for its own.
- name: REFRAIN_THREADS
  valueFrom:
    resourceFieldRef: {containerName: refrain, resource: requests.cpu}
{{- include "refrain.namespaceKey" . }}
{{- include "refrain.env" .Values.remote.env }}
{{- include "refrain.env" .Values.engine.env }}
{{- end }}

{{- define "refrain.engine.envFrom" -}}
{{- with .Values.remote.secret }}
- secretRef: {name: {{ . }}}
{{- end }}
{{- end }}

{{- define "refrain.engine.mounts" -}}
- {name: data, mountPath: /data, subPath: data}
{{- if .Values.model.claim }}
- {name: models, mountPath: /models, readOnly: true}
{{- else }}
- {name: data, mountPath: /models, subPath: models}
{{- end }}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{/* Takes (list . TYPE-OF-STORAGE). */}}
{{- define "refrain.engine.volumes" -}}
{{- $root := index . 0 -}}{{- $storage := $root.Values.engine.storage -}}
- name: tmp
  emptyDir: {}
{{- with $root.Values.model.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- if eq (index . 1) "emptyDir" }}
- name: data
  emptyDir: {sizeLimit: {{ $storage.gib }}Gi}
{{- else if eq (index . 1) "ephemeral" }}
- name: data
  ephemeral:
    volumeClaimTemplate:
      spec: {{ include "refrain.engine.claim" $root | nindent 8 }}
{{- end }}
{{- end }}

{{- define "refrain.engine.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.engine.storage.class }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests: {storage: {{ .Values.engine.storage.gib }}Gi}
{{- end }}
