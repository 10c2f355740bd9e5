{{- define "plexrl.name" -}}
{{- $name := printf "%s-%s" .Release.Name .Chart.Name }}
{{- if contains .Chart.Name .Release.Name }}{{ $name = .Release.Name }}{{ end }}
{{- $name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Labels of everything: (dict "root" $ "part" NAME). */}}
{{- define "plexrl.labels" -}}
{{ include "plexrl.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "plexrl.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{/* Metadata of a pod: (dict "root" $ "part" NAME "config" TEXT). A new configuration makes new pods. */}}
{{- define "plexrl.podMetadata" -}}
labels:
  {{- include "plexrl.labels" . | nindent 2 }}
  {{- with .extra }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  plexrl.dev/config: {{ .config | default "" | sha256sum | trunc 16 | quote }}
  {{- with .root.Values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* An image: (dict "root" $ "kind" "control"). A digest goes before a tag. */}}
{{- define "plexrl.image" -}}
{{- $image := index .root.Values.images .kind -}}
{{- .root.Values.images.prefix }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "plexrl.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user }}
runAsGroup: {{ .Values.user }}
fsGroup: {{ .Values.user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "plexrl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "plexrl.pull" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "plexrl.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "plexrl.keysSecret" -}}
{{ .Values.keys.existingSecret | default (printf "%s-keys" (include "plexrl.name" .)) }}
{{- end }}

{{- define "plexrl.authoritySecret" -}}
{{ .Values.keys.existingAuthority | default (printf "%s-authority" (include "plexrl.name" .)) }}
{{- end }}

{{/* Folders that every process writes to: its settings, its certificate and temporary files. */}}
{{- define "plexrl.runVolumes" -}}
- name: run
  emptyDir: {medium: Memory, sizeLimit: 64Mi}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: config
  configMap: {name: {{ .config }}}
- name: identity
  projected:
    sources:
      - serviceAccountToken:
          audience: plexrl-issuer
          expirationSeconds: 3600
          path: token
      - configMap:
          name: {{ include "plexrl.name" .root }}-authority
          items: [{key: ca.pem, path: ca.pem}]
{{- end }}

{{- define "plexrl.runMounts" -}}
- {name: run, mountPath: /run/plexrl}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{/*
The certificate of a pod's process, renewed while the pod runs (a sidecar), and its settings.
(dict "root" $ "kind" "control" "role" ROLE "env" [variables of the settings] "files" [names])
*/}}
{{- define "plexrl.preparing" -}}
- name: certificate
  image: {{ include "plexrl.image" . }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  restartPolicy: Always
  args:
    - certificate
    - --issuer=https://{{ include "plexrl.name" .root }}-issuer.{{ .root.Release.Namespace }}.svc:7443
    - --identity=/run/identity
    - --folder=/run/plexrl/tls
  startupProbe:
    exec: {command: [test, -s, /run/plexrl/tls/certificate.pem]}
    periodSeconds: 1
    failureThreshold: 300
  securityContext:
    {{- include "plexrl.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 64Mi}
    limits: {memory: 128Mi}
  volumeMounts:
    - {name: run, mountPath: /run/plexrl}
    - {name: identity, mountPath: /run/identity, readOnly: true}
- name: settings
  image: {{ include "plexrl.image" . }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  args:
    - settings
    - --from=/etc/plexrl
    - --to=/run/plexrl/settings
    {{- range .args }}
    - {{ . }}
    {{- end }}
  env:
    - name: NAMESPACE
      valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
    - name: POD
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    - name: NODE
      valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
    {{- with .env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  securityContext:
    {{- include "plexrl.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 64Mi}
    limits: {memory: 256Mi}
  volumeMounts:
    - {name: run, mountPath: /run/plexrl}
    - {name: config, mountPath: /etc/plexrl, readOnly: true}
    {{- with .mounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Bytes of a quantity such as `64Gi`, as the processes' settings want them. */}}
{{- define "plexrl.bytes" -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- $unit := regexFind "[A-Za-z]+$" . -}}
{{- mul $number (get $units $unit | default 1 | int64) -}}
{{- end }}
